"""Reports: pictures, pages and terminal tables from plain data.

Everything here takes the dictionaries that audits, experiments and run folders hold, so an old file
renders as a fresh result does and a report never measures anything. Nothing is imported here; ask
for the part by its file, such as `halfulp.report.panels`.
"""
