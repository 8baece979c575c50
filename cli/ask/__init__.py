"""Commands that submit jobs and print their answers."""
