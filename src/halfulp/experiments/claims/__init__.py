"""The claims ledger: `model` says what a claim is, `ledger` runs them, the other files hold the
claims by topic.
"""
