#pragma once

#include "cluster.h"

namespace cute {

inline void cluster_arrive() { sim::arrive_at_cluster(); }
inline void cluster_arrive_relaxed() { sim::arrive_at_cluster(); }
inline void cluster_wait() { sim::wait_for_cluster(); }

}  // namespace cute
