"""Nodes that join by themselves, pods and hosts by hand: workers dial the head, both sides prove the token."""
