"""Meshes, reduction trees and dispatchers."""
