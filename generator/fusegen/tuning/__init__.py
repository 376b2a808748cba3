"""Selection rules from measurements: sizes to measure, one bundle per point, fitting, writing.

What runs on a GPU is a function that callers give; nothing here needs one.
"""
