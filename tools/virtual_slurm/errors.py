"""What can go wrong, by what the caller can do about it."""

EX_UNAVAILABLE = 69  # sysexits.h; the Slurm tests skip on it, and only on it


class ClusterError(Exception):
    """The cluster did not do what was asked."""

    exit_code = 1


class CommandNotFoundError(ClusterError):
    """`exec` was given a command that the machine does not have."""

    exit_code = 127  # the shell's


class ClusterUnavailableError(ClusterError):
    """This host cannot carry the cluster: not root, packages missing, namespaces forbidden."""

    exit_code = EX_UNAVAILABLE
