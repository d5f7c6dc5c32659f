"""Keep a fleet of VMs busy with training jobs: a database, and loops that poll, dispatch and requeue."""
