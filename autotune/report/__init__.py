"""What a study found, for people and programs: terminal answer, files, page, dashboard."""
