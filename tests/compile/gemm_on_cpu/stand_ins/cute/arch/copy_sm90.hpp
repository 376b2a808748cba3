#pragma once  // stmatrix, which epilogue.cuh writes itself: see without_ptx.py
