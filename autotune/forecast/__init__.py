"""Forecasts of peak memory and step time, from a profile of the model and the rates of the machine."""
