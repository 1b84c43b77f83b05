# make book       executes the notebooks and builds build/html
# make test       everything that must hold: code, statements, notebooks, book
# make reproduce  PROFILE=... : the notebooks of another profile; goes on where it was stopped
# make gpu        on one GPU: the solvers' costs and the embedded tasks at a larger batch, recorded
# make record     PROFILE=... : the summary of its training runs, into book/results/measured/
# make notebook   NAME=... : a copy of notebook 11 for a divergence of your own
# make pdf        the whole book in one file, after make book: build/bandpo-companion.pdf
# make clean      removes build/ (caches and runs too), keeps .venv

PROFILE ?= cpu
BIN := .venv/bin
# One thread a process, processes side by side.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

.PHONY: book test reproduce gpu record notebook pdf clean setup browser lint notebooks html
.NOTPARALLEL:

book: setup notebooks
	$(TEST) -q -m claim
	$(MAKE) html

test: setup browser lint
	$(TEST) -m "not book"
	$(MAKE) notebooks html
	$(BIN)/pytest -m book

reproduce: setup
	$(BIN)/python -m bandpo.run --profile $(PROFILE)

gpu: setup
	$(BIN)/python tests/benchmarks/bench_operator.py --device cuda --compiled-size 10000000 \
		--out book/results/measured/solver-cost-gpu.json
	$(MAKE) reproduce record PROFILE=embedded-gpu

record: setup
	$(BIN)/python -m bandpo.summary build/runs/$(PROFILE) book/results/measured/$(PROFILE).json

notebook: setup
	$(BIN)/python tools/notebook.py "$(NAME)"

pdf: setup browser
	$(BIN)/python tools/pdf.py

clean:
	rm -rf build

setup:
	python3 tools/setup.py

browser: setup
	python3 tools/setup.py --browser

lint:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPYPATH=book/_ext $(BIN)/mypy bandpo tools book/_ext/companion
	$(BIN)/lint-imports
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb

notebooks:
	$(BIN)/python -m bandpo.run

# Warnings are errors. Every page is built anew, because a page that Sphinx does not read again does
# not warn again, and one that left the book would stay. build/html is replaced only by a book that
# was built without a warning.
html:
	rm -rf build/_build
	$(BIN)/jupyter-book build . -W -n --keep-going --all --path-output build
	rm -rf build/html.new && cp -r build/_build/html build/html.new
	rm -rf build/html && mv build/html.new build/html
	@echo "The book: build/html/index.html"
