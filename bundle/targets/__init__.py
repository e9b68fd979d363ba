"""What a cluster is told of a job: a module per scheduler renders the job file for it and speaks to it."""
