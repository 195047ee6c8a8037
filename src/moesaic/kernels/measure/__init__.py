"""How fast this machine reads memory, multiplies matrices and reads a disk: a program each."""
