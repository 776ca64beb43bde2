"""What every run leaves behind and how runs are made: folders and files, results as plain data,
jobs in parallel.
"""
