"""What only `halfulp claims` reaches: the papers' runs, and the ledger of what was found.

`claim` says what a claim is, `ledger` runs them, the files in `claims/` hold them by topic.
"""
