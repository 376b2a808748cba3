"""The modules of this bundle inside other libraries, one file for each."""
