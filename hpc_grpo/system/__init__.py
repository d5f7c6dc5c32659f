"""What the operating system offers: processes, signals, and a terminal to speak to."""
