"""An export over whole files: `mini-ee batch`. No torch here.

rows.py      reads the files, a block of rows at a time
parts.py     computes a block and writes its part file, whole or not at all
pools.py     one process, several, or actors on Ray
job.py       the job: what is missing, errors, the summary
rival.py     a linear model on n-grams, for the projection
"""
