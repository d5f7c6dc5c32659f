"""What both sides of a publish share: the bucket layout, the node's store, its group, and the contract on names."""
