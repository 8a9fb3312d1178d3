"""The merge over a process group."""
