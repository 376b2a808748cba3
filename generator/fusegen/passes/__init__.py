"""The passes from a module spec to its plan, all pure, in the order in which ``resolve`` runs them."""
