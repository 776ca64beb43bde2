"""Measurements of attention while a model trains: what every layer and head does, and where its error points."""
