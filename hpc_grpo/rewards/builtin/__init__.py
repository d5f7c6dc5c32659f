"""The built-in rewards, one file each, imported when a config names them."""
