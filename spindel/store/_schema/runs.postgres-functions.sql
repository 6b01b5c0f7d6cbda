-- How each mutation of the core is applied and how its identity is read back: the pair of what `_sqlite_runs.py` does.
--
-- A row is looked up by its id alone. What else is asked of it stands in `(...) IS TRUE`, which keeps the planner from
-- the index of running rows: where a table has no statistics yet that looks as good, and it has every running row of
-- the room.

CREATE FUNCTION pg_temp.same_identity(a spindel.runs, b spindel.runs) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT (
    a.id, a.room, a.incarnation, a.kind, a.actor, a.parent_id, a.trigger_id, a.provenance, a.family_version,
    a.created_at, a.started_at, a.job_version, a.job_key, a.job_offer, a.job_experiment
  ) IS NOT DISTINCT FROM (
    b.id, b.room, b.incarnation, b.kind, b.actor, b.parent_id, b.trigger_id, b.provenance, b.family_version,
    b.created_at, b.started_at, b.job_version, b.job_key, b.job_offer, b.job_experiment
  );
$$;

CREATE FUNCTION pg_temp.taken(run spindel.runs) RETURNS pg_temp.verdict LANGUAGE sql AS $$
  SELECT pg_temp.refused(CASE WHEN run.status = 'running' THEN 'run-exists' ELSE 'terminal-fence' END, NULL);
$$;

CREATE FUNCTION pg_temp.run_unknown(room text, id uuid) RETURNS pg_temp.verdict LANGUAGE sql AS $$
  SELECT pg_temp.refused('run-unknown', format('room ''%s'' has no run %s', room, id));
$$;

CREATE FUNCTION pg_temp.before_families(id uuid) RETURNS pg_temp.verdict LANGUAGE sql AS $$
  SELECT pg_temp.refused('family-version', format('run %s is from before families', id));
$$;

CREATE FUNCTION pg_temp.ended_as(run spindel.runs) RETURNS pg_temp.verdict LANGUAGE sql AS $$
  SELECT pg_temp.refused('terminal-fence', format('run %s ended as %s', run.id, run.status));
$$;

CREATE FUNCTION pg_temp.find_run(wanted uuid) RETURNS spindel.runs LANGUAGE sql AS $$
  SELECT * FROM spindel.runs WHERE id = wanted;
$$;

-- -- admission --

CREATE FUNCTION pg_temp.admit_run(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  wanted spindel.runs := jsonb_populate_record(NULL::spindel.runs, mutation);
  known spindel.runs;
BEGIN
  SELECT * INTO known FROM spindel.runs WHERE id = wanted.id;
  IF FOUND THEN
    -- Acknowledged again while the row is as this command made it: running, with equal content.
    IF known.status = 'running' AND pg_temp.same_identity(known, wanted) THEN
      RETURN pg_temp.unchanged();
    END IF;
    RETURN pg_temp.taken(known);
  END IF;
  wanted.status := 'running';
  wanted.updated_at := wanted.started_at;
  INSERT INTO spindel.runs SELECT wanted.*;
  RETURN pg_temp.changed();
END;
$$;

CREATE FUNCTION pg_temp.confirm_admit_run(mutation jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  wanted spindel.runs := jsonb_populate_record(NULL::spindel.runs, mutation);
  known spindel.runs := pg_temp.find_run(wanted.id);
BEGIN
  IF known.id IS NULL THEN
    RETURN 'absent';
  END IF;
  RETURN CASE WHEN known.status = 'running' AND pg_temp.same_identity(known, wanted) THEN 'present' ELSE 'conflict' END;
END;
$$;

-- -- fences --

CREATE FUNCTION pg_temp.is_fence(run spindel.runs, mutation jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT (run.status, run.reason, run.error, run.ended_at)
    IS NOT DISTINCT FROM ('failed', 'admission-failed', mutation->>'error', (mutation->>'ended_at')::bigint);
$$;

CREATE FUNCTION pg_temp.fence_admission(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  wanted spindel.runs := jsonb_populate_record(NULL::spindel.runs, mutation->'admission');
  known spindel.runs;
BEGIN
  wanted.status := 'failed';
  wanted.reason := 'admission-failed';
  wanted.error := mutation->>'error';
  wanted.ended_at := (mutation->>'ended_at')::bigint;
  wanted.updated_at := wanted.ended_at;
  SELECT * INTO known FROM spindel.runs WHERE id = wanted.id;
  IF NOT FOUND THEN
    INSERT INTO spindel.runs SELECT wanted.*;
    RETURN pg_temp.changed();
  ELSIF NOT pg_temp.same_identity(known, wanted) THEN
    RETURN pg_temp.taken(known);
  ELSIF known.status = 'running' THEN
    UPDATE spindel.runs SET
      status = wanted.status, reason = wanted.reason, error = wanted.error, ended_at = wanted.ended_at,
      updated_at = wanted.updated_at
    WHERE id = wanted.id;
    RETURN pg_temp.changed();
  ELSIF pg_temp.is_fence(known, mutation) THEN
    RETURN pg_temp.unchanged();
  END IF;
  RETURN pg_temp.ended_as(known);
END;
$$;

CREATE FUNCTION pg_temp.confirm_fence_admission(mutation jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  wanted spindel.runs := jsonb_populate_record(NULL::spindel.runs, mutation->'admission');
  known spindel.runs := pg_temp.find_run(wanted.id);
BEGIN
  IF known.id IS NULL THEN
    RETURN 'absent';
  ELSIF NOT pg_temp.same_identity(known, wanted) THEN
    RETURN 'conflict';
  ELSIF known.status = 'running' THEN
    RETURN 'absent';
  END IF;
  RETURN CASE WHEN pg_temp.is_fence(known, mutation) THEN 'present' ELSE 'conflict' END;
END;
$$;

-- -- outcomes: {"finish": the mutation, "family": the witness of the family's return, if it returned} --

CREATE FUNCTION pg_temp.is_outcome(run spindel.runs, finish jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT (
    run.status, run.reason, run.error, coalesce(run.ended_at, run.updated_at), run.job_result_state, run.job_scorecard
  ) IS NOT DISTINCT FROM (
    finish->>'status', finish->>'reason', finish->>'error', (finish->>'ended_at')::bigint,
    finish->>'job_result_state', (finish->>'job_scorecard')::uuid
  );
$$;

CREATE FUNCTION pg_temp.finish_run(argument jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  finish jsonb := argument->'finish';
  witness uuid := (argument->>'family')::uuid;
  wanted spindel.runs := jsonb_populate_record(NULL::spindel.runs, finish);
  known spindel.runs;
BEGIN
  UPDATE spindel.runs SET
    status = wanted.status, reason = wanted.reason, error = wanted.error,
    ended_at = CASE WHEN wanted.status <> 'waiting' THEN wanted.ended_at END,
    job_result_state = wanted.job_result_state, job_scorecard = wanted.job_scorecard, updated_at = wanted.ended_at,
    family_return_ack = coalesce(witness, family_return_ack)
  WHERE id = wanted.id
    AND (room = wanted.room AND status = 'running' AND (witness IS NULL OR family_version IS NOT NULL)) IS TRUE;
  IF FOUND THEN
    RETURN pg_temp.changed();
  END IF;
  SELECT * INTO known FROM spindel.runs WHERE id = wanted.id AND room = wanted.room;
  IF NOT FOUND THEN
    RETURN pg_temp.run_unknown(wanted.room, wanted.id);
  ELSIF known.status = 'running' THEN
    RETURN pg_temp.before_families(wanted.id);
  ELSIF NOT pg_temp.is_outcome(known, finish) THEN
    RETURN pg_temp.ended_as(known);
  ELSIF witness IS NOT NULL AND known.family_return_ack IS NULL THEN
    RETURN pg_temp.refused('witness-late', format('run %s ended without its family witness', wanted.id));
  END IF;
  RETURN pg_temp.unchanged();
END;
$$;

CREATE FUNCTION pg_temp.confirm_finish_run(argument jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  finish jsonb := argument->'finish';
  known spindel.runs := pg_temp.find_run((finish->>'id')::uuid);
BEGIN
  IF (known.room = finish->>'room' AND known.status <> 'running') IS NOT TRUE THEN
    RETURN 'absent';
  END IF;
  RETURN CASE
    WHEN pg_temp.is_outcome(known, finish) AND (argument->>'family' IS NULL OR known.family_return_ack IS NOT NULL)
      THEN 'present'
    ELSE 'conflict'
  END;
END;
$$;

-- -- causes --

-- Each is looked up by itself, as a subquery for one value must be: as a join, all causes of the Run would be read.
-- Of another room's Run all are missing: whoever doesn't own it isn't told what it has.
CREATE FUNCTION pg_temp.missing_causes(mutation jsonb) RETURNS SETOF uuid LANGUAGE sql AS $$
  SELECT DISTINCT wanted::uuid FROM jsonb_array_elements_text(mutation->'causes') AS wanted
    WHERE (
      SELECT true FROM spindel.run_causes WHERE run_id = (mutation->>'id')::uuid AND cause_id = wanted::uuid
    ) IS NULL
    OR (SELECT room FROM spindel.runs WHERE id = (mutation->>'id')::uuid) IS DISTINCT FROM mutation->>'room';
$$;

CREATE FUNCTION pg_temp.record_causes(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  missing uuid[] := ARRAY(SELECT pg_temp.missing_causes(mutation));
  consumer spindel.runs := pg_temp.find_run((mutation->>'id')::uuid);
BEGIN
  IF missing = '{}' THEN
    RETURN pg_temp.unchanged();
  ELSIF consumer.room IS DISTINCT FROM mutation->>'room' THEN
    RETURN pg_temp.refused('cause', format('run %s isn''t running, so it consumes nothing', mutation->>'id'));
  END IF;
  INSERT INTO spindel.run_causes (run_id, cause_id) SELECT consumer.id, unnest(missing);
  RETURN pg_temp.changed();
END;
$$;

CREATE FUNCTION pg_temp.confirm_record_causes(mutation jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  consumer spindel.runs := pg_temp.find_run((mutation->>'id')::uuid);
BEGIN
  IF NOT EXISTS (SELECT pg_temp.missing_causes(mutation)) THEN
    RETURN 'present';
  END IF;
  RETURN CASE
    WHEN (consumer.room = mutation->>'room' AND consumer.status <> 'running') IS TRUE THEN 'conflict'
    ELSE 'absent'
  END;
END;
$$;

-- -- witnesses: {"witnesses": the mutation, "valid": whether each value is its stage's witness of this Run} --

CREATE FUNCTION pg_temp.append_witnesses(argument jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  mutation jsonb := argument->'witnesses';
  run_id uuid := (mutation->>'id')::uuid;
  wanted_family uuid := (mutation->>'family')::uuid;
  wanted_core uuid := (mutation->>'core')::uuid;
  wanted_adapter uuid := (mutation->>'adapter')::uuid;
  known spindel.runs;
BEGIN
  IF NOT (argument->>'valid')::boolean THEN
    RETURN pg_temp.refused('witness-invalid', format('a value is not the stage''s witness of run %s', run_id));
  END IF;
  UPDATE spindel.runs SET
    family_return_ack = coalesce(family_return_ack, wanted_family),
    job_core_cleanup_ack = coalesce(job_core_cleanup_ack, wanted_core),
    job_adapter_cleanup_ack = coalesce(job_adapter_cleanup_ack, wanted_adapter),
    updated_at = greatest(updated_at, (mutation->>'at')::bigint)
  WHERE id = run_id AND (
    room = mutation->>'room' AND (
      (wanted_family IS NOT NULL AND family_return_ack IS NULL)
      OR (wanted_core IS NOT NULL AND job_core_cleanup_ack IS NULL)
      OR (wanted_adapter IS NOT NULL AND job_adapter_cleanup_ack IS NULL)
    ) AND (wanted_family IS NULL OR family_version IS NOT NULL)
  ) IS TRUE;
  IF FOUND THEN
    RETURN pg_temp.changed();
  END IF;
  known := pg_temp.find_run(run_id);
  IF known.room IS DISTINCT FROM mutation->>'room' THEN
    RETURN pg_temp.run_unknown(mutation->>'room', run_id);
  ELSIF wanted_family IS NOT NULL AND known.family_version IS NULL THEN
    RETURN pg_temp.before_families(run_id);
  END IF;
  RETURN pg_temp.unchanged();
END;
$$;

CREATE FUNCTION pg_temp.confirm_append_witnesses(argument jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  mutation jsonb := argument->'witnesses';
  known spindel.runs := pg_temp.find_run((mutation->>'id')::uuid);
  early_missing boolean;
BEGIN
  IF NOT (argument->>'valid')::boolean THEN
    RETURN 'conflict';
  ELSIF known.room IS DISTINCT FROM mutation->>'room' THEN
    RETURN 'absent';
  END IF;
  early_missing := (mutation->>'family' IS NOT NULL AND known.family_return_ack IS NULL)
    OR (mutation->>'core' IS NOT NULL AND known.job_core_cleanup_ack IS NULL);
  IF early_missing AND known.status <> 'running' THEN
    RETURN 'conflict';
  ELSIF early_missing OR (mutation->>'adapter' IS NOT NULL AND known.job_adapter_cleanup_ack IS NULL) THEN
    RETURN 'absent';
  END IF;
  RETURN 'present';
END;
$$;

-- -- disposal --

CREATE FUNCTION pg_temp.record_disposal(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  run_id uuid := (mutation->>'id')::uuid;
BEGIN
  UPDATE spindel.runs SET
    admission_disposal = mutation->>'disposal', updated_at = greatest(updated_at, (mutation->>'at')::bigint)
  WHERE id = run_id AND (room = mutation->>'room' AND admission_disposal IS NULL) IS TRUE;
  IF FOUND THEN
    RETURN pg_temp.changed();
  -- Either it has its disposal, of which there is only one kind, or there is no such row.
  ELSIF EXISTS (SELECT 1 FROM spindel.runs WHERE id = run_id AND room = mutation->>'room') THEN
    RETURN pg_temp.unchanged();
  END IF;
  RETURN pg_temp.run_unknown(mutation->>'room', run_id);
END;
$$;

CREATE FUNCTION pg_temp.confirm_record_disposal(mutation jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  known spindel.runs := pg_temp.find_run((mutation->>'id')::uuid);
BEGIN
  IF (known.room = mutation->>'room' AND known.status <> 'running') IS NOT TRUE THEN
    RETURN 'absent';
  ELSIF known.admission_disposal = mutation->>'disposal' THEN
    RETURN 'present';
  END IF;
  RETURN CASE
    WHEN (known.status = 'failed' AND known.reason = 'admission-failed' AND known.admission_disposal IS NULL) IS TRUE
      THEN 'absent'
    ELSE 'conflict'
  END;
END;
$$;

-- -- rooms --

-- Two ranges of the index of running rows, so that a full house of one's own rows would not be read either. The times
-- of a row never go backwards, even if this machine's clock stands before that of the process which died.
CREATE FUNCTION pg_temp.adopt_orphans(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  mine uuid := (mutation->>'incarnation')::uuid;
  now_at bigint := (mutation->>'at')::bigint;
  adopted bigint;
BEGIN
  IF NOT EXISTS (SELECT 1 FROM spindel.rooms WHERE name = mutation->>'room' AND incarnation = mine) THEN
    RETURN pg_temp.refused('not-owner', format('room ''%s'' is in another incarnation', mutation->>'room'));
  END IF;
  UPDATE spindel.runs SET
    status = 'failed', reason = 'orphaned', ended_at = greatest(now_at, updated_at),
    updated_at = greatest(now_at, updated_at),
    job_result_state = CASE WHEN job_offer IS NOT NULL THEN 'unavailable' END
  WHERE id = ANY (ARRAY(
    SELECT orphan.id FROM (
      SELECT id FROM spindel.runs WHERE room = mutation->>'room' AND status = 'running' AND incarnation < mine
      UNION ALL
      SELECT id FROM spindel.runs WHERE room = mutation->>'room' AND status = 'running' AND incarnation > mine
    ) AS orphan LIMIT (mutation->>'limit')::bigint
  ));
  GET DIAGNOSTICS adopted = ROW_COUNT;
  RETURN (adopted > 0, to_jsonb(adopted), NULL, NULL)::pg_temp.verdict;
END;
$$;

CREATE FUNCTION pg_temp.confirm_adopt_orphans(mutation jsonb) RETURNS text LANGUAGE sql AS $$
  SELECT CASE
    WHEN EXISTS (
      SELECT 1 FROM spindel.runs
        WHERE room = mutation->>'room' AND status = 'running' AND incarnation <> (mutation->>'incarnation')::uuid
    ) THEN 'absent'
    ELSE 'present'
  END;
$$;

CREATE FUNCTION pg_temp.claim_room(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
DECLARE
  wanted spindel.rooms := jsonb_populate_record(NULL::spindel.rooms, mutation);
  claimed bigint;
BEGIN
  INSERT INTO spindel.rooms AS rooms (name, incarnation, epoch, owner, opened_at, closed_at)
  VALUES (mutation->>'room', wanted.incarnation, 1, wanted.owner, (mutation->>'at')::bigint, NULL)
  ON CONFLICT (name) DO UPDATE SET
    incarnation = excluded.incarnation, epoch = rooms.epoch + 1, owner = excluded.owner, closed_at = NULL,
    opened_at = greatest(
      excluded.opened_at, rooms.opened_at, rooms.closed_at,
      (
        SELECT started_at FROM spindel.runs WHERE room = mutation->>'room' ORDER BY started_at DESC, id DESC LIMIT 1
      )
    )
  RETURNING epoch INTO claimed;
  RETURN pg_temp.changed(to_jsonb(claimed));
END;
$$;

CREATE FUNCTION pg_temp.leave_room(mutation jsonb) RETURNS pg_temp.verdict LANGUAGE plpgsql AS $$
BEGIN
  UPDATE spindel.rooms SET owner = NULL, closed_at = greatest((mutation->>'at')::bigint, opened_at)
  WHERE name = mutation->>'room' AND epoch = (mutation->>'epoch')::bigint AND closed_at IS NULL;
  RETURN (FOUND, NULL, NULL, NULL)::pg_temp.verdict;
END;
$$;
