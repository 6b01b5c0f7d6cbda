-- Rooms, Runs and causes, before families had an evidence of their own.
--
-- The rules of a row stand here and not in Python, so that no other program and no bug of ours walks around them:
-- whoever opens this file meets the same triggers. Each refusal is one of a closed set of codes.
--
-- Ids are canonical UUID texts, times UTC microseconds. The tables have no rowid: `INSERT OR REPLACE` with another
-- row's rowid would delete that row without asking any trigger.

CREATE TABLE migrations (
  part TEXT NOT NULL,
  number INTEGER NOT NULL,
  checksum TEXT NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (part, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE rooms (
  name TEXT NOT NULL PRIMARY KEY,
  incarnation TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  owner TEXT CHECK (owner IS NULL OR json_valid(owner)),
  opened_at INTEGER NOT NULL,
  closed_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE runs (
  -- Identity: never changes.
  id TEXT NOT NULL PRIMARY KEY,
  room TEXT NOT NULL REFERENCES rooms (name),
  incarnation TEXT NOT NULL,
  kind TEXT NOT NULL,
  actor TEXT NOT NULL,
  parent_id TEXT REFERENCES runs (id),
  trigger_id TEXT,
  provenance TEXT NOT NULL CHECK (json_valid(provenance)),
  job_version INTEGER,
  job_key TEXT,
  job_offer TEXT,
  job_experiment TEXT,
  created_at INTEGER NOT NULL,
  started_at INTEGER NOT NULL,
  -- Outcome: written once.
  status TEXT NOT NULL CHECK (status IN ('running', 'waiting', 'completed', 'failed', 'cancelled')),
  reason TEXT CHECK (reason IS NULL OR (length(reason) BETWEEN 1 AND 64 AND reason NOT GLOB '*[^a-z0-9-]*')),
  error TEXT CHECK (error IS NULL OR length(error) <= 2000),
  ended_at INTEGER,
  job_result_state TEXT,
  job_scorecard TEXT,
  updated_at INTEGER NOT NULL,
  CHECK ((ended_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled')))
) STRICT, WITHOUT ROWID;

CREATE INDEX runs_by_start ON runs (room, started_at DESC, id DESC);
CREATE INDEX runs_by_parent ON runs (parent_id, started_at DESC, id DESC);
-- Adoption reads this one only, so a long history costs an opening nothing.
CREATE INDEX runs_running ON runs (room, incarnation) WHERE status = 'running';

CREATE TABLE run_causes (
  run_id TEXT NOT NULL REFERENCES runs (id),
  cause_id TEXT NOT NULL REFERENCES runs (id),
  PRIMARY KEY (run_id, cause_id)
) STRICT, WITHOUT ROWID;

-- A trigger before the insert also meets OR REPLACE, OR IGNORE and upsert, which go around a trigger on update.
CREATE TRIGGER runs_insert BEFORE INSERT ON runs
BEGIN
  SELECT CASE WHEN status = 'running' THEN RAISE(ABORT, 'run-exists') ELSE RAISE(ABORT, 'terminal-fence') END
    FROM runs WHERE id = NEW.id;
  SELECT RAISE(ABORT, 'not-owner')
    WHERE NOT EXISTS (SELECT 1 FROM rooms WHERE name = NEW.room AND incarnation = NEW.incarnation);
  SELECT RAISE(ABORT, 'parent-not-live')
    WHERE NEW.parent_id IS NOT NULL
      AND NOT EXISTS (
        SELECT 1 FROM runs
          WHERE id = NEW.parent_id AND room = NEW.room AND incarnation = NEW.incarnation AND status = 'running'
      );
  SELECT CASE
    WHEN NOT (
      (NEW.status = 'running' AND NEW.reason IS NULL AND NEW.error IS NULL)
      OR (NEW.status = 'failed' AND NEW.reason IS 'admission-failed')
    ) THEN RAISE(ABORT, 'initial-status')
    WHEN NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL THEN RAISE(ABORT, 'witness-at-admission')
  END;
END;

-- Each trigger on update names its columns, so that the hot writes never pay for the checks of what they don't touch.
CREATE TRIGGER runs_identity
BEFORE UPDATE OF
  id, room, incarnation, kind, actor, parent_id, trigger_id, provenance, job_version, job_key, job_offer,
  job_experiment, created_at, started_at
ON runs
WHEN
  OLD.id IS NOT NEW.id OR OLD.room IS NOT NEW.room OR OLD.incarnation IS NOT NEW.incarnation
  OR OLD.kind IS NOT NEW.kind OR OLD.actor IS NOT NEW.actor OR OLD.parent_id IS NOT NEW.parent_id
  OR OLD.trigger_id IS NOT NEW.trigger_id OR OLD.provenance IS NOT NEW.provenance
  OR OLD.job_version IS NOT NEW.job_version OR OLD.job_key IS NOT NEW.job_key OR OLD.job_offer IS NOT NEW.job_offer
  OR OLD.job_experiment IS NOT NEW.job_experiment OR OLD.created_at IS NOT NEW.created_at
  OR OLD.started_at IS NOT NEW.started_at
BEGIN
  SELECT RAISE(ABORT, 'identity-immutable');
END;

CREATE TRIGGER runs_outcome
BEFORE UPDATE OF status, reason, error, ended_at, job_result_state, job_scorecard ON runs
BEGIN
  SELECT CASE
    WHEN OLD.status <> 'running' AND (
      OLD.status IS NOT NEW.status OR OLD.reason IS NOT NEW.reason OR OLD.error IS NOT NEW.error
      OR OLD.ended_at IS NOT NEW.ended_at OR OLD.job_result_state IS NOT NEW.job_result_state
      OR OLD.job_scorecard IS NOT NEW.job_scorecard
    ) THEN RAISE(ABORT, 'terminal-fence')
    WHEN (NEW.status = 'running' AND (NEW.reason IS NOT NULL OR NEW.error IS NOT NULL OR NEW.ended_at IS NOT NULL))
      OR (NEW.ended_at IS NULL AND (NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL))
      THEN RAISE(ABORT, 'outcome-early')
  END;
END;

CREATE TRIGGER runs_delete BEFORE DELETE ON runs
BEGIN
  SELECT RAISE(ABORT, 'rows-are-kept');
END;

CREATE TRIGGER run_causes_insert BEFORE INSERT ON run_causes
BEGIN
  SELECT RAISE(ABORT, 'cause')
    WHERE NEW.run_id = NEW.cause_id
      OR NOT EXISTS (
        SELECT 1 FROM runs AS consumer JOIN runs AS cause ON cause.room = consumer.room
          WHERE consumer.id = NEW.run_id AND consumer.status = 'running'
            AND cause.id = NEW.cause_id AND cause.ended_at IS NOT NULL
      );
END;

CREATE TRIGGER run_causes_update BEFORE UPDATE ON run_causes
BEGIN
  SELECT RAISE(ABORT, 'rows-are-kept');
END;

CREATE TRIGGER run_causes_delete BEFORE DELETE ON run_causes
BEGIN
  SELECT RAISE(ABORT, 'rows-are-kept');
END;
