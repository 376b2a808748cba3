#pragma once  // stmatrix, which sink/epilogue.sm90.cuh writes itself: see without_ptx.py
