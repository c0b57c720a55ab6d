"""Recipes that come with Squall: each file holds a function of the file's name that returns a `squall.Job`.

They are the top floor of the house: a recipe uses Squall as a user does, and nothing but the command line looks
for one.
"""
