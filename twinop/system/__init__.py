"""The machine: processes, memory, files, and what is shown of long work."""
