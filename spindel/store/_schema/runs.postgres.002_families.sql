-- Families: the version of a Run's family state, the witnesses of its return, and what became of a fenced admission.
--
-- Rows that are here already keep NULL as family version: they stay readable and never count as settled, since nobody
-- can tell any more whether their families returned.

ALTER TABLE spindel.runs
  ADD COLUMN family_version bigint,
  ADD COLUMN family_return_ack uuid CHECK (family_return_ack IS NULL OR family_version IS NOT NULL),
  ADD COLUMN job_core_cleanup_ack uuid,
  ADD COLUMN job_adapter_cleanup_ack uuid,
  ADD COLUMN admission_disposal text COLLATE "C"
    CHECK (admission_disposal IS NULL OR admission_disposal = 'discarded');

CREATE OR REPLACE FUNCTION spindel.runs_insert() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  known text;
  parent record;
BEGIN
  SELECT status INTO known FROM spindel.runs WHERE id = NEW.id;
  IF FOUND THEN
    PERFORM spindel.refuse(CASE WHEN known = 'running' THEN 'run-exists' ELSE 'terminal-fence' END);
  END IF;
  -- Whoever claims the room waits until this transaction is over, and the other way round.
  PERFORM 1 FROM spindel.rooms WHERE name = NEW.room AND incarnation = NEW.incarnation FOR SHARE;
  IF NOT FOUND THEN
    PERFORM spindel.refuse('not-owner');
  END IF;
  IF NEW.parent_id IS NOT NULL THEN
    -- As above, with whoever ends the parent. Asked by its id alone: by more, the planner would take the index of
    -- running rows, which has nothing but those of one room.
    SELECT room, incarnation, status INTO parent FROM spindel.runs WHERE id = NEW.parent_id FOR SHARE;
    IF NOT FOUND OR (parent.room, parent.incarnation, parent.status) <> (NEW.room, NEW.incarnation, 'running') THEN
      PERFORM spindel.refuse('parent-not-live');
    END IF;
  END IF;
  IF (NEW.status = 'running' AND NEW.reason IS NULL AND NEW.error IS NULL)
    OR (NEW.status = 'failed' AND NEW.reason IS NOT DISTINCT FROM 'admission-failed')
  THEN
    IF NEW.job_result_state IS NOT NULL OR NEW.job_scorecard IS NOT NULL OR NEW.family_return_ack IS NOT NULL
      OR NEW.job_core_cleanup_ack IS NOT NULL OR NEW.job_adapter_cleanup_ack IS NOT NULL
      OR NEW.admission_disposal IS NOT NULL
    THEN
      PERFORM spindel.refuse('witness-at-admission');
    END IF;
  ELSE
    PERFORM spindel.refuse('initial-status');
  END IF;
  RETURN NEW;
END;
$$;

CREATE TRIGGER runs_update_1_version BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (OLD.family_version IS DISTINCT FROM NEW.family_version)
EXECUTE FUNCTION spindel.refuse_row('identity-immutable');

-- A witness says that a boundary was passed. It is written once, in the order of the boundaries. Whether its value is
-- the right one is checked by the writer and by `spindel check`, as in every store.
CREATE TRIGGER runs_update_4_witness BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  (OLD.family_return_ack IS NOT NULL AND OLD.family_return_ack IS DISTINCT FROM NEW.family_return_ack)
  OR (OLD.job_core_cleanup_ack IS NOT NULL AND OLD.job_core_cleanup_ack IS DISTINCT FROM NEW.job_core_cleanup_ack)
  OR (
    OLD.job_adapter_cleanup_ack IS NOT NULL
    AND OLD.job_adapter_cleanup_ack IS DISTINCT FROM NEW.job_adapter_cleanup_ack
  )
  OR (OLD.admission_disposal IS NOT NULL AND OLD.admission_disposal IS DISTINCT FROM NEW.admission_disposal)
)
EXECUTE FUNCTION spindel.refuse_row('witness-fence');

CREATE TRIGGER runs_update_5_late BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  OLD.status <> 'running' AND (
    OLD.family_return_ack IS DISTINCT FROM NEW.family_return_ack
    OR OLD.job_core_cleanup_ack IS DISTINCT FROM NEW.job_core_cleanup_ack
  )
)
EXECUTE FUNCTION spindel.refuse_row('witness-late');

CREATE TRIGGER runs_update_6_adapter BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  OLD.job_adapter_cleanup_ack IS DISTINCT FROM NEW.job_adapter_cleanup_ack
  AND (OLD.job_core_cleanup_ack IS NULL OR OLD.ended_at IS NULL)
)
EXECUTE FUNCTION spindel.refuse_row('adapter-order');

CREATE TRIGGER runs_update_7_disposal BEFORE UPDATE ON spindel.runs FOR EACH ROW
WHEN (
  OLD.admission_disposal IS DISTINCT FROM NEW.admission_disposal
  AND NOT (OLD.status = 'failed' AND OLD.reason IS NOT DISTINCT FROM 'admission-failed')
)
EXECUTE FUNCTION spindel.refuse_row('disposal-order');
