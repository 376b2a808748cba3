"""What a plan is made of: buffers, steps, shapes, conditions.  Imports nothing else of ours."""
