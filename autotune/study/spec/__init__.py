"""The specification of a study: `study.yaml`, flags and presets, validated."""
