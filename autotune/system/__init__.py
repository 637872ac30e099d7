"""Files, processes, signals, shared memory, redaction, units and the machine; nothing about tuning."""
