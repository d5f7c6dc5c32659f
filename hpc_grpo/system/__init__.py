"""The operating system: processes, signals, commands of the machine, and a terminal to speak to."""
