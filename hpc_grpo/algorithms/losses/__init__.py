"""The losses that `loss.name` chooses from: one file each, registered under the file's name."""
