"""Runs programs that a model wrote: without network, files of the user or a way out, within limits, and killable.

`isolation` runs a job from a reward worker; `enter` makes the namespaces; `inside` runs the programs in them. The last
two are programs of the standard library alone, since neither the package nor its imports are in the sandbox.
"""
