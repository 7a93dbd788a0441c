use super::*;
use crate::engine::sim::{config::SimConfig, tokens::expected};

struct Rig {
    commands: mpsc::UnboundedSender<Command>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    sender: mpsc::UnboundedSender<(usize, Event)>,
    snapshot: Arc<Mutex<Snapshot>>,
}

fn rig(config: &SimConfig) -> Rig {
    let (commands, receiver) = mpsc::unbounded_channel();
    let (sender, events) = mpsc::unbounded_channel();
    let snapshot = Arc::new(Mutex::new(Snapshot::default()));
    let driver = Driver {
        rank: Rank::new(config.rank(), "v1".into()),
        time_scale: config.time_scale,
        snapshot: Arc::clone(&snapshot),
        history: Arc::new(Mutex::new(History::new(10))),
        clock: Clock::start(),
        dispatched: Arc::new(AtomicUsize::new(10)),
        crash: Arc::new(|| {}),
        jobs: HashMap::new(),
        slow: 1.0,
        paused: false,
        dead: false,
        anchor: None,
        idle_since: Instant::now(),
    };
    tokio::spawn(driver.run(receiver));
    Rig {
        commands,
        events,
        sender,
        snapshot,
    }
}

impl Rig {
    fn submit(&self, id: u64, prompt: Vec<u32>, max_new: u32) {
        let job = Job {
            id: JobId(id),
            prompt,
            max_new,
            seed: 0,
            stop_ids: Vec::new(),
            ignore_eos: true,
            stops_past_eos: false,
            min_new: 0,
            compute_from: None,
            namespace: "".into(),
            priority: 0,
            notify_every: 1,
            poison: false,
        };
        let waiter = Waiter {
            rid: format!("r{id}").into(),
            index: 0,
            since: Instant::now(),
            events: self.sender.clone(),
            record: None,
        };
        let submission = Submission { job, waiter };
        self.commands
            .send(Command::Submit(vec![submission]))
            .unwrap();
    }

    async fn done(&mut self) -> Vec<u32> {
        let mut tokens = Vec::new();
        loop {
            match self.events.recv().await.unwrap().1 {
                Event::Progress { tokens: more, .. } => tokens.extend(more),
                Event::Done { done, .. } => {
                    tokens.extend(done.tokens);
                    return tokens;
                }
                _ => {}
            }
        }
    }
}

/// At this scale a step lasts 0.43 ms, less than the timer can tell. A sleep
/// for each would take a millisecond or more: 0.5 s instead of 0.23.
#[tokio::test(start_paused = true)]
async fn steps_shorter_than_the_timers_tick_do_not_drift() {
    for scale in [0.05, 1.0] {
        let mut rig = rig(&SimConfig {
            time_scale: scale,
            ..SimConfig::default()
        });
        let prompt: Vec<u32> = (0..4096).collect();
        let began = Instant::now();
        rig.submit(1, prompt.clone(), 512);
        let tokens = rig.done().await;
        let took = began.elapsed().as_secs_f64();
        assert_eq!(tokens, expected(&prompt, 0, 512, 151_936));
        // What the scheduler's own test says of this turn.
        let model = 4.598 * scale;
        assert!((took - model).abs() < 2e-3, "{took} of {model}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_rank_stands_still_with_its_entry() {
    let mut rig = rig(&SimConfig::default());
    rig.submit(1, vec![1, 2, 3], 100);
    rig.events.recv().await.unwrap();
    rig.commands
        .send(Command::Pause { retract: false })
        .unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    while rig.events.try_recv().is_ok() {}
    let before = rig.snapshot.lock().at;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(rig.events.try_recv().is_err());
    let after = rig.snapshot.lock().clone();
    assert!((after.at - before).abs() < 1e-9);
    assert!(!after.fresh && after.load.running == 1);
    rig.commands.send(Command::Continue).unwrap();
    rig.done().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_rank_takes_as_many_times_as_long() {
    let mut rig = rig(&SimConfig::default());
    rig.commands.send(Command::Slow(10.0)).unwrap();
    let began = Instant::now();
    rig.submit(1, vec![1, 2, 3], 10);
    rig.done().await;
    let took = began.elapsed().as_secs_f64();
    assert!((0.82..0.84).contains(&took), "{took}");
}

#[tokio::test(start_paused = true)]
async fn a_prefix_meets_all_that_begin_with_it() {
    let mut rig = rig(&SimConfig::default());
    for id in [1, 10, 2] {
        rig.submit(id, vec![1, 2, 3], 10_000);
    }
    // All of them run once there is a second token of each.
    for _ in 0..10 {
        rig.events.recv().await.unwrap();
    }
    rig.commands
        .send(Command::Abort(Selector::Prefix("r1".into())))
        .unwrap();
    let mut ended = Vec::new();
    while ended.len() < 2 {
        if let (_, Event::Done { job, done }) = rig.events.recv().await.unwrap() {
            assert_eq!(done.ended, Ended::Aborted);
            ended.push(job.0);
        }
    }
    ended.sort_unstable();
    assert_eq!(ended, [1, 10]);
}
