//! Power losses, made from a trace of what the driver wrote and synced. An
//! image of the disk at some moment holds every write that a sync had covered
//! by then, and of the others any part, torn at 512 bytes. `sync_file_range`
//! counts as nothing: it promises nothing.

use berth::store::Store as _;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use berth::store::sled::{SledOptions, SledStore};

use super::{
    Rng, count,
    driver::{History, Plan},
    support::key,
};

/// One thing that the driver did to a file, between two moments.
#[derive(Debug)]
enum Act {
    Write { offset: u64, data: Vec<u8> },
    Truncate { len: u64 },
    Sync,
    Create,
    Rename { to: PathBuf },
    Remove,
}

#[derive(Debug)]
struct Event {
    path: PathBuf,
    act: Act,
    start: usize,
    end: usize,
}

/// Everything that the driver did, in order of its beginning.
#[derive(Debug, Default)]
struct Trace {
    events: Vec<Event>,
    /// When each line of the journal began to be written, and the line.
    told: Vec<(usize, String)>,
}

/// It may be missing, or not allowed to trace.
fn has_strace() -> bool {
    Command::new("strace")
        .args(["-o", "/dev/null", "true"])
        .output()
        .is_ok_and(|output| output.status.success())
}

/// A store as it was closed once, and a trace of a driver that worked on it.
/// The store is half full of keys that expire while the driver works, so that
/// sled moves pages and writes over segments that were in use.
fn record(dir: &Path, plan: &Plan) -> (PathBuf, Trace, History) {
    let (store, base) = (dir.join("store"), dir.join("base"));
    let old = Plan {
        seed: 1,
        callers: 16,
        requests: 60,
        first_key: 1_000_000,
        hours_ago: 48,
        ..plan.clone()
    };
    let status = old.start(&store, &dir.join("journal-0")).wait().unwrap();
    assert!(status.success());
    let first = Plan {
        seed: 2,
        callers: 4,
        requests: 60,
        hours_ago: 26,
        retention_hours: 100,
        ..plan.clone()
    };
    let mut history = History::default();
    let journal = dir.join("journal-1");
    let status = first.start(&store, &journal).wait().unwrap();
    assert!(status.success());
    history.add(&fs::read_to_string(&journal).unwrap());
    copy(&store, &base);
    let trace = dir.join("trace");
    let trace_path = trace.to_str().unwrap();
    let calls = "trace=openat,write,pwrite64,ftruncate,fsync,fdatasync,rename,unlink,mkdir";
    let wrap = [
        "strace", "-f", "-y", "-xx", "-s", "8388608", "-e", calls, "-o", trace_path,
    ];
    let journal = dir.join("journal-2");
    let output = plan.command(&wrap, &store, &journal).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    let text = fs::read_to_string(&trace).unwrap();
    (base, parse(&text, &store, &journal), history)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Reads strace's lines. Paths in the events are relative to the store.
fn parse(text: &str, store: &Path, journal: &Path) -> Trace {
    let mut trace = Trace::default();
    let mut unfinished: BTreeMap<&str, (usize, String)> = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let Some((thread, rest)) = line.split_once(char::is_whitespace) else {
            continue;
        };
        let rest = rest.trim_start();
        let (start, call) = if let Some(head) = rest.strip_suffix(" <unfinished ...>") {
            unfinished.insert(thread, (at, head.into()));
            continue;
        } else if rest.starts_with("<... ") {
            let Some((start, head)) = unfinished.remove(thread) else {
                continue;
            };
            let tail = rest.split_once("resumed>").map_or("", |(_, tail)| tail);
            (start, format!("{head}{tail}"))
        } else {
            (at, rest.to_owned())
        };
        read_call(&mut trace, &call, start, at, store, journal);
    }
    assert!(
        unfinished
            .values()
            .all(|(_, head)| !head.starts_with("pwrite"))
    );
    trace.events.sort_by_key(|event| event.start);
    trace.told.sort_by_key(|(at, _)| *at);
    trace
}

fn read_call(
    trace: &mut Trace,
    call: &str,
    start: usize,
    end: usize,
    store: &Path,
    journal: &Path,
) {
    let Some((name, rest)) = call.split_once('(') else {
        return;
    };
    let Some((arguments, result)) = rest.rsplit_once(" = ") else {
        return;
    };
    if result.starts_with('-') {
        return;
    }
    let arguments = arguments.trim_end().trim_end_matches(')');
    // The path of the descriptor in the first argument, as -y prints it.
    let of_descriptor = |text: &str| {
        let (_, path) = text.split_once('<')?;
        let (path, _) = path.split_once('>')?;
        let path = path.strip_suffix("(deleted)").unwrap_or(path);
        Some(PathBuf::from(plain(path)))
    };
    let strings =
        |text: &str| -> Vec<Vec<u8>> { text.split('"').skip(1).step_by(2).map(unhex).collect() };
    let named = |index: usize| {
        strings(arguments)
            .get(index)
            .map(|name| PathBuf::from(String::from_utf8_lossy(name).into_owned()))
    };
    let (path, act) = match name {
        "pwrite64" => {
            let offset = arguments.rsplit(", ").next().and_then(|n| n.parse().ok());
            let data = strings(arguments).remove(0);
            let offset = offset.unwrap();
            (of_descriptor(arguments), Act::Write { offset, data })
        }
        "write" if of_descriptor(arguments).as_deref() == Some(journal) => {
            let line = strings(arguments).remove(0);
            trace.told.push((start, String::from_utf8(line).unwrap()));
            return;
        }
        "write" => {
            // Only sled's snapshots are written so, from their beginning on.
            let path = of_descriptor(arguments);
            let written = trace.events.iter().filter(|e| {
                Some(&e.path)
                    == path
                        .as_ref()
                        .and_then(|p| p.strip_prefix(store).ok().map(Path::to_path_buf))
                        .as_ref()
            });
            let offset = written
                .map(|e| match &e.act {
                    Act::Write { data, .. } => data.len() as u64,
                    _ => 0,
                })
                .sum();
            let data = strings(arguments).remove(0);
            (path, Act::Write { offset, data })
        }
        "ftruncate" => {
            let len = arguments.rsplit(", ").next().unwrap().parse().unwrap();
            (of_descriptor(arguments), Act::Truncate { len })
        }
        "fsync" | "fdatasync" => (of_descriptor(arguments), Act::Sync),
        "openat" if arguments.contains("O_CREAT") => (of_descriptor(result), Act::Create),
        "rename" => {
            let to = named(1).unwrap();
            let to = to.strip_prefix(store).map(Path::to_path_buf);
            match to {
                Ok(to) => (named(0), Act::Rename { to }),
                Err(_) => return,
            }
        }
        "unlink" => (named(0), Act::Remove),
        _ => return,
    };
    let Some(path) = path
        .as_deref()
        .and_then(|path| path.strip_prefix(store).ok())
    else {
        return;
    };
    trace.events.push(Event {
        path: path.into(),
        act,
        start,
        end,
    });
}

/// With -xx even the paths of descriptors come as hexadecimal, or they do not.
fn plain(text: &str) -> String {
    if text.starts_with("\\x") {
        String::from_utf8(unhex(text)).unwrap()
    } else {
        text.into()
    }
}

fn unhex(text: &str) -> Vec<u8> {
    text.split("\\x")
        .skip(1)
        .map(|byte| u8::from_str_radix(&byte[..2], 16).unwrap())
        .collect()
}

impl Trace {
    /// For each event, when a sync that covers it was over.
    fn synced_at(&self) -> Vec<usize> {
        let mut syncs: BTreeMap<&Path, Vec<(usize, usize)>> = BTreeMap::new();
        for event in &self.events {
            if matches!(event.act, Act::Sync) {
                let of_path = syncs.entry(&event.path).or_default();
                of_path.push((event.start, event.end));
            }
        }
        let covered = |event: &Event| {
            let of_path = syncs.get(event.path.as_path())?;
            let first = of_path.partition_point(|(start, _)| *start <= event.end);
            of_path[first..].iter().map(|(_, end)| *end).min()
        };
        self.events
            .iter()
            .map(|event| covered(event).unwrap_or(usize::MAX))
            .collect()
    }

    /// The disk as a power loss at `moment` leaves it, from files as they were.
    fn image(
        &self,
        mut files: BTreeMap<PathBuf, Vec<u8>>,
        synced_at: &[usize],
        moment: usize,
        rng: &mut Rng,
    ) -> BTreeMap<PathBuf, Vec<u8>> {
        // How much of what was not synced has reached the disk, in quarters.
        let reached = rng.below(5);
        // Names reach the disk in their order; a sync of any file or directory
        // brings them all, so those after the last one are in doubt.
        let last_sync = self
            .events
            .iter()
            .filter(|e| matches!(e.act, Act::Sync) && e.end < moment)
            .map(|e| e.start)
            .max()
            .unwrap_or(0);
        let names_until = last_sync + rng.below((moment - last_sync) as u64 + 1) as usize;
        for (event, synced_at) in self.events.iter().zip(synced_at) {
            if event.start >= moment {
                break;
            }
            let named = event.start <= names_until;
            match &event.act {
                Act::Create if named => {
                    files.entry(event.path.clone()).or_default();
                }
                Act::Rename { to } if named => {
                    if let Some(file) = files.remove(&event.path) {
                        files.insert(to.clone(), file);
                    }
                }
                Act::Remove if named => {
                    files.remove(&event.path);
                }
                Act::Truncate { len } if event.end < moment => {
                    if let Some(file) = files.get_mut(&event.path) {
                        file.resize(*len as usize, 0);
                    }
                }
                Act::Write { offset, data } => {
                    let Some(file) = files.get_mut(&event.path) else {
                        continue;
                    };
                    let synced = *synced_at < moment;
                    let end = *offset as usize + data.len();
                    if file.len() < end && (synced || reached > 0) {
                        file.resize(end, 0);
                    }
                    let mut at = 0;
                    while at < data.len() {
                        let place = *offset as usize + at;
                        let len = (512 - place % 512).min(data.len() - at);
                        if synced || rng.below(4) < reached {
                            file[place..place + len].copy_from_slice(&data[at..at + len]);
                        }
                        at += len;
                    }
                }
                _ => {}
            }
        }
        files
    }

    /// Answers about a key that were given before a sync covered the last write
    /// about that key, and those after: with one caller at a time, the answer
    /// rests on that write. What else the store writes meanwhile, as it likes, is
    /// none of the answer's business.
    fn too_early(&self) -> (usize, usize) {
        let synced_at = self.synced_at();
        let (mut early, mut covered) = (0, 0);
        // Where there is a redo log it is what counts: sled comes later, and writes
        // pages again that hold what was durable long before.
        let logged = |event: &Event| {
            event.path == Path::new("redo") && matches!(event.act, Act::Write { .. })
        };
        let log = if self.events.iter().any(logged) {
            "redo"
        } else {
            "sled/db"
        };
        for (moment, line) in &self.told {
            let mut words = line.split_whitespace().skip(1);
            let Some(n) = words.next().and_then(|n| n.parse().ok()) else {
                continue;
            };
            // sled keeps keys without what neighbours have in common.
            let needle = &key(n).0[8..];
            let finder = |data: &[u8]| data.windows(needle.len()).any(|w| w == needle);
            let about = |event: &Event, file: &str| {
                event.path == Path::new(file)
                    && event.start < *moment
                    && matches!(&event.act, Act::Write { data, .. } if finder(data))
            };
            let events = self.events.iter().zip(&synced_at).rev();
            let last = events
                .filter(|(event, _)| about(event, log))
                .map(|(_, at)| *at)
                .next();
            match last {
                Some(synced) if synced < *moment => covered += 1,
                Some(_) => early += 1,
                // A result of the time before the trace.
                None => {}
            }
        }
        (early, covered)
    }
}

fn read_all(dir: &Path, under: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = under.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            read_all(&entry.path(), &name, files);
        } else {
            files.insert(name, fs::read(entry.path()).unwrap());
        }
    }
}

fn write_all(files: &BTreeMap<PathBuf, Vec<u8>>, dir: &Path) {
    let _ = fs::remove_dir_all(dir);
    fs::create_dir_all(dir.join("sled/blobs")).unwrap();
    for (name, bytes) in files {
        fs::write(dir.join(name), bytes).unwrap();
    }
}

fn plan(callers: u64, requests: u64) -> Plan {
    Plan {
        seed: 3,
        callers,
        requests,
        keys: 1500,
        ..Plan::default()
    }
}

const NO_STRACE: &str = "SKIPPED: strace is missing or may not trace, so no power loss can be made";

#[test]
fn no_answer_comes_before_the_sync_that_covers_it() {
    if !has_strace() {
        eprintln!("{NO_STRACE}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_, trace, _) = record(dir.path(), &plan(1, 40));
    assert!(trace.told.len() > 60, "{}", trace.told.len());
    let (early, covered) = trace.too_early();
    assert_eq!(early, 0);
    assert!(covered > trace.told.len() / 2, "{covered}");
    // The check can fail: without the sync it does.
    let dir = tempfile::tempdir().unwrap();
    let relaxed = Plan {
        relaxed: true,
        ..plan(1, 40)
    };
    let (_, trace, _) = record(dir.path(), &relaxed);
    let (early, _) = trace.too_early();
    assert!(early > trace.told.len() / 2, "{early}");
}

#[tokio::test]
async fn nothing_acknowledged_is_lost_with_the_power() {
    if !has_strace() {
        eprintln!("{NO_STRACE}");
        return;
    }
    let images = count("BERTH_STORE_IMAGES", 8);
    let dir = tempfile::tempdir().unwrap();
    let (base, trace, before) = record(dir.path(), &plan(6, 30));
    let mut files = BTreeMap::new();
    read_all(&base, Path::new(""), &mut files);
    let synced_at = trace.synced_at();
    let mut rng = Rng(0xdead);
    let end = trace.events.last().unwrap().end;
    let mut acknowledged = 0;
    for image in 0..images {
        let moment = 1 + rng.below(end as u64) as usize;
        let to = dir.path().join("image");
        write_all(
            &trace.image(files.clone(), &synced_at, moment, &mut rng),
            &to,
        );
        let told: String = trace
            .told
            .iter()
            .filter(|(at, _)| *at < moment)
            .map(|(_, line)| line.as_str())
            .collect();
        let mut history = History {
            done: before.done.clone(),
            sent: before.sent.clone(),
            boots: before.boots.clone(),
        };
        history.add(&told);
        let store = match SledStore::open(&to, SledOptions::default()) {
            Ok(store) => store,
            Err(e) => panic!("image {image} at {moment}: {e}"),
        };
        history.check(&store, 0).await;
        store.close().await.unwrap();
        acknowledged += history.done.len() + history.sent.len();
    }
    let log = Path::new("sled/db");
    let used = files[log].len() as u64;
    let writes = trace.events.iter().filter(|e| e.path == log);
    let over = writes.filter(|e| matches!(e.act, Act::Write { offset, .. } if offset < used));
    let over = over.count();
    println!(
        "{images} power losses, {acknowledged} acknowledgements checked, 0 lost; {over} writes \
         over segments that were in use"
    );
    assert!(over > 10, "segments were not written over: {over}");
}
