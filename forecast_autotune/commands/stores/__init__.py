"""Commands on stores: `export`, `import`, `store merge|diff|verify|gc|bundle|install`, and which store is meant."""
