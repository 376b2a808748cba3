"""Selection rules from measurements: sizes to measure, one bundle per point, fitting, writing.
The floors that plans allow, against which measurements are held.

What runs on a GPU is a function that callers give; nothing here needs one.
"""
