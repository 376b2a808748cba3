"""What the device code of each kernel family can do, one file per family."""
