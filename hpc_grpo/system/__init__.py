"""The operating system: processes, signals, commands of the machine, and output to the user."""
