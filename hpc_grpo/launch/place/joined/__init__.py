"""Nodes that join by themselves: pods, and hosts started by hand. Workers dial the head; both prove the token."""
