"""The studies in optuna-dashboard, with notes, figures and downloads of ours."""
