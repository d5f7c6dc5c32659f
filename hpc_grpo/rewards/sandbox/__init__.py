"""Runs programs that a model wrote: without network, user files or a way out, within limits, and killable.

`isolation` starts a sandbox from a reward worker or an environment. `enter` makes its namespaces. `inside` is its first
process: it installs the filter of `syscalls` and runs the jobs. `unit_tests` runs tests on a program in another
process, with the messages of `plain`. `cells` runs the programs of a session of the tool `python`. All except
`isolation` run inside, and import only the standard library.
"""
