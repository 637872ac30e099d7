"""The rank side: started with `python -m autotune.worker`, never imported by the driver."""
