"""Records that driver and ranks exchange: workload, request, result, and the files of a trial."""
