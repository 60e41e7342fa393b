# Commands for contributors. See CONTRIBUTING.md.
.PHONY: check lint types imports test all

check: lint types imports test  ## what CI demands of every change

lint:
	ruff check .
	ruff format --check .

types:
	mypy
	mypy --config-file tests/mypy.ini

imports:
	lint-imports

test:  ## the default tests
	pytest -n 2 --dist loadfile

all:  ## every test, and the documentation with the commands on its pages
	tests/all
