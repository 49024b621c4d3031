"""The tables of a journal."""

APPLICATION_ID = 0x4D454D41  # "MEMA", in the header of the file
_RUNS = """
CREATE TABLE run (
    name TEXT PRIMARY KEY,
    settings TEXT NOT NULL,
    files TEXT NOT NULL,
    parent TEXT,
    parent_step INTEGER,
    created TEXT NOT NULL,
    paused TEXT
);
CREATE TABLE step (
    run TEXT NOT NULL REFERENCES run (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    phase TEXT NOT NULL,
    prompt TEXT NOT NULL,
    step TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID
"""
_MEMORIES = """
CREATE TABLE memory (
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    run TEXT REFERENCES run (name),
    beginning TEXT,
    length INTEGER,
    digest TEXT,
    PRIMARY KEY (name, number)
) WITHOUT ROWID;
CREATE INDEX memory_beginning ON memory (name, beginning);
CREATE INDEX memory_run ON memory (run)
"""
_MARKS = "ALTER TABLE run ADD COLUMN mark TEXT"
SCHEMA = {2: _RUNS, 3: _MEMORIES, 4: _MARKS}
"""The tables by the format that brought them. A run's `mark` (`ownership`) is that of its settings and files. A step's
`phase` is "memory", "answer" (which ends the run), or "insufficient" (an answer for which the document is read once
more). `memory` has a row for each text (as JSON) of a named memory: that of the reading `run`, whose document has
`length` characters, or of a person (NULL)."""
