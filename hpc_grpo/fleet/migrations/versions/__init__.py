"""One file a version of the schema, each on top of the one before."""
