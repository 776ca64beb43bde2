"""The claims, a file a topic: a_ and b_ are the papers', the others the project's own."""
