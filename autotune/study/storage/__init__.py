"""What a study keeps: Optuna's database, our records in it, leases, history."""
