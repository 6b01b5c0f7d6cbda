-- Families: the version of a Run's family state, the witnesses of its return, and what became of a fenced admission.
--
-- Rows that are here already keep NULL as family version: they stay readable and never count as settled, since nobody
-- can tell any more whether their families returned.

ALTER TABLE runs ADD COLUMN family_version INTEGER;
ALTER TABLE runs ADD COLUMN family_return_ack TEXT CHECK (family_return_ack IS NULL OR family_version IS NOT NULL);
ALTER TABLE runs ADD COLUMN job_core_cleanup_ack TEXT;
ALTER TABLE runs ADD COLUMN job_adapter_cleanup_ack TEXT;
ALTER TABLE runs ADD COLUMN admission_disposal TEXT CHECK (admission_disposal IS NULL OR admission_disposal = 'discarded');

DROP TRIGGER runs_insert;

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
    WHEN NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL OR NEW.family_return_ack IS NOT NULL
      OR NEW.job_core_cleanup_ack IS NOT NULL OR NEW.job_adapter_cleanup_ack IS NOT NULL
      OR NEW.admission_disposal IS NOT NULL THEN RAISE(ABORT, 'witness-at-admission')
  END;
END;

CREATE TRIGGER runs_family_identity BEFORE UPDATE OF family_version ON runs
WHEN OLD.family_version IS NOT NEW.family_version
BEGIN
  SELECT RAISE(ABORT, 'identity-immutable');
END;

-- A witness says that a boundary was passed. It is written once, in the order of the boundaries. Whether its value is
-- the right one is checked by the writer and by `spindel check`: SQLite has no SHA-1.
CREATE TRIGGER runs_witnesses
BEFORE UPDATE OF family_return_ack, job_core_cleanup_ack, job_adapter_cleanup_ack, admission_disposal ON runs
BEGIN
  SELECT CASE
    WHEN (OLD.family_return_ack IS NOT NULL AND OLD.family_return_ack IS NOT NEW.family_return_ack)
      OR (OLD.job_core_cleanup_ack IS NOT NULL AND OLD.job_core_cleanup_ack IS NOT NEW.job_core_cleanup_ack)
      OR (OLD.job_adapter_cleanup_ack IS NOT NULL AND OLD.job_adapter_cleanup_ack IS NOT NEW.job_adapter_cleanup_ack)
      OR (OLD.admission_disposal IS NOT NULL AND OLD.admission_disposal IS NOT NEW.admission_disposal)
      THEN RAISE(ABORT, 'witness-fence')
    WHEN OLD.status <> 'running' AND (
      OLD.family_return_ack IS NOT NEW.family_return_ack OR OLD.job_core_cleanup_ack IS NOT NEW.job_core_cleanup_ack
    ) THEN RAISE(ABORT, 'witness-late')
    WHEN NEW.job_adapter_cleanup_ack IS NOT NULL AND (OLD.job_core_cleanup_ack IS NULL OR OLD.ended_at IS NULL)
      THEN RAISE(ABORT, 'adapter-order')
    WHEN NEW.admission_disposal IS NOT NULL AND NOT (OLD.status = 'failed' AND OLD.reason IS 'admission-failed')
      THEN RAISE(ABORT, 'disposal-order')
  END;
END;
