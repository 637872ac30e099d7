"""What a configuration will need, before it runs: memory and step time from formulas, to be corrected by what is measured."""
