use super::*;

#[test]
fn the_nearer_source_wins() {
    let flags = Options {
        max_pins: Some(1),
        ..Options::default()
    };
    let file: Options =
        toml::from_str("max-pins = 2\nmax-streams = 3\nheartbeat-interval = \"5s\"").unwrap();
    let config = Config::resolve(flags.or(file)).unwrap();
    assert_eq!(config.router.max_pins, 1);
    assert_eq!(config.limits.max_streams, 3);
    assert_eq!(config.fleet.lease.interval, Duration::from_secs(5));
    assert_eq!(config.listen, Config::default().listen);
}

#[test]
fn an_unknown_key_is_an_error() {
    let error = toml::from_str::<Options>("max-pin = 2").unwrap_err();
    assert!(error.to_string().contains("max-pin"), "{error}");
}

#[test]
fn a_value_of_the_wrong_type_hides_no_other_fault() {
    let (options, found) = file::parse(
        "max-pins = \"many\"\nmax-streams = -1\nmax-attempts = 5000000000\nretention = 5\n\
         grace = \"soon\"\nload-factor = \"high\"\naccept-loss = 1\nlisten = \"localhost\"\n\
         durability = \"none\"\ncredentials = [\"secret\"]\nlog = 3\nmax-pin = 7\n\
         admin-listen = \"0.0.0.0:7701\"\nmax-replicas = 0\ndrain-grace = \"25h\"\n[serve]\n",
    )
    .unwrap();
    // What could be read is.
    assert_eq!(options.max_replicas, Some(0));
    let error = Config::resolve_with(options, found, |_| Ok(())).unwrap_err();
    let mut told: Vec<String> = error.to_string().lines().map(str::to_owned).collect();
    told.sort();
    assert_eq!(
        told,
        [
            "  accept-loss: must be true or false, is 1",
            "  credentials: must be a path in quotes, is a list",
            "  drain-grace: must be from 0s to 1day",
            "  durability: must be one of \"fsync\", \"relaxed\", is \"none\"",
            "  grace: must be a time in quotes, as \"2s\" or \"5m\", is \"soon\"",
            "  listen: must be an address and a port in quotes, as \"127.0.0.1:7700\", is \
             \"localhost\"",
            "  load-factor: must be a number, is \"high\"",
            "  log: must be a text in quotes, is 3",
            "  max-attempts: 5000000000 is too large",
            "  max-pin: is no option (see `berth serve --help`)",
            "  max-pins: must be a whole number from 0, is \"many\"",
            "  max-replicas: must be from 1 to 65536",
            "  max-streams: must be a whole number from 0, is -1",
            "  retention: must be a time in quotes, as \"2s\" or \"5m\", is 5",
            "  serve: is no option (see `berth serve --help`)",
            // Whether the admin port may be open rests on the credentials, which could
            // not be read.
            "the configuration is not usable:",
        ]
    );
}

#[test]
fn what_is_shown_is_a_file_of_the_same_configuration() {
    let config = |text: &str| {
        let (options, found) = file::parse(text).unwrap();
        Config::resolve_with(options, found, |_| Ok(())).unwrap().0
    };
    for text in [
        "",
        "load-factor = inf\nkv-admission = 0.9\nmoves-per-minute = 7\nmove-margin = \"1m 5s\"\n\
         engine-networks = \"10.0.0.0/8,fd12::/16\"\nengine-ports = \"80,8000-8099\"\n\
         credentials = 'a \"file\"'\naudit-log = \"x\"\nreflection = \"admin\"\n\
         tls-cert = \"c\"\ntls-key = \"k\"\ntls-client-ca = \"a\"\nlog-format = \"json\"\n\
         tls-require-client-cert = true\notlp-endpoint = \"http://127.0.0.1:4317\"\n\
         otlp-sample-ratio = 0.25\ndurability = \"relaxed\"\nkeyless-prefix = true\n",
    ] {
        let shown = config(text).shown();
        for line in text.lines() {
            assert!(
                shown.lines().any(|shown| shown == line),
                "{line} in {shown}"
            );
        }
        let again = config(&shown);
        assert_eq!(again.shown(), shown);
        assert_eq!(format!("{again:?}"), format!("{:?}", config(text)));
        assert!(!shown.contains("Some") && !shown.contains('_'), "{shown}");
        // Every option stands there once.
        let known = <Options as clap::Args>::augment_args(clap::Command::new("serve"));
        for option in known.get_arguments().filter_map(clap::Arg::get_long) {
            let words = shown.split([' ', '\n', ',']);
            assert_eq!(
                words.filter(|word| *word == option).count(),
                1,
                "{option}: {shown}"
            );
        }
    }
}

#[test]
fn all_faults_are_told_at_once() {
    let options: Options = toml::from_str(
        "listen = \"0.0.0.0:7700\"\nload-factor = 0.5\nmax-attempts = 0\ngrace = \"2days\"\n\
         drain-grace = \"25h\"\nkv-admission = -1.0\nmoves-per-minute = 200000\n\
         max-prefix-blocks = 0\notlp-endpoint = \"https://u:p@collector:4317\"\n\
         otlp-sample-ratio = 1.5\nmax-connections = 0\nidle-timeout = \"1ms\"\n\
         max-header-bytes = 10\nmax-unfinished-bytes = 1\nmax-control-frames = 1\n\
         admin-max-connections-per-address = 0\nmax-replicas-per-principal = 0\n\
         max-ranks = 0\nmax-ranks-per-principal = 0",
    )
    .unwrap();
    let error = Config::resolve(options).unwrap_err().to_string();
    for option in [
        "listen",
        "load-factor",
        "max-attempts",
        "grace",
        "drain-grace",
        "kv-admission",
        "moves-per-minute",
        "max-prefix-blocks",
        "otlp-endpoint",
        "otlp-sample-ratio",
        "max-connections:",
        "idle-timeout",
        "max-header-bytes",
        "max-unfinished-bytes",
        "max-control-frames",
        "admin-max-connections-per-address",
        "max-replicas-per-principal",
        "max-ranks:",
        "max-ranks-per-principal",
    ] {
        assert!(error.contains(option), "{option} in {error}");
    }
    assert!(!error.contains("u:p"), "{error}");
}

#[test]
fn infinity_is_a_load_factor_and_nan_is_not() {
    let with = |load_factor| {
        Config::resolve(Options {
            load_factor: Some(load_factor),
            ..Options::default()
        })
    };
    assert!(with(f64::INFINITY).is_ok());
    assert!(with(f64::NAN).is_err());
}

#[test]
fn a_collectors_url_has_nothing_that_would_be_dropped() {
    let with = |endpoint: &str| {
        let options = Options {
            otlp_endpoint: Some(endpoint.to_owned()),
            ..Options::default()
        };
        Config::resolve(options).map_err(|fault| fault.to_string())
    };
    for good in ["http://127.0.0.1:4317", "http://collector:4317/"] {
        assert!(with(good).is_ok(), "{good}");
    }
    for rest in ["/v1/traces", "?x", "#x", "/#"] {
        let fault = with(&format!("http://127.0.0.1:4317{rest}")).unwrap_err();
        assert!(fault.contains("otlp-endpoint"), "{fault}");
    }
}

#[test]
fn misspelt_variables_are_found() {
    let names = [
        "BERTH_LISTEN",
        "BERTH_LISTN",
        "PATH",
        "BERTH_SERVICE_HOST",
        "BERTH_PORT_7700_TCP",
    ]
    .map(str::to_owned);
    assert_eq!(
        unknown_variables(names.into_iter(), &["BERTH_LISTEN".to_owned()]),
        ["BERTH_LISTN"]
    );
}

#[test]
fn the_network_is_served_only_with_credentials() {
    let open = "listen = \"0.0.0.0:7700\"";
    let error = Config::resolve(toml::from_str(open).unwrap()).unwrap_err();
    assert!(error.to_string().contains("credentials"), "{error}");
    let known = format!("{open}\ncredentials = \"/etc/berth/credentials\"");
    let config = Config::resolve(toml::from_str(&known).unwrap()).unwrap();
    // Who serves a network does not find engines on its own machine unless told so.
    assert!(!config.egress.loopback);
    // Nor does who names other networks: these are all.
    let named = |text: &str| Config::resolve(toml::from_str(text).unwrap()).unwrap();
    assert!(!named("engine-networks = \"10.0.0.0/8\"").egress.loopback);
    let both = named("engine-networks = \"10.0.0.0/8,127.0.0.0/8\"").egress;
    assert_eq!(both.check("127.0.0.1:30000".parse().unwrap()), Ok(()));
    assert!(named("").egress.loopback);
    let admin = "admin-listen = \"0.0.0.0:7701\"";
    let error = Config::resolve(toml::from_str(admin).unwrap()).unwrap_err();
    assert!(error.to_string().contains("admin-listen"), "{error}");
    let known = format!("{known}\n{admin}");
    assert!(Config::resolve(toml::from_str(&known).unwrap()).is_ok());
}

#[test]
fn tls_needs_all_its_files() {
    let resolve = |text: &str| Config::resolve(toml::from_str(text).unwrap());
    let pair = "tls-cert = \"c\"\ntls-key = \"k\"";
    assert!(resolve(pair).unwrap().auth.tls.is_some());
    for wrong in [
        "tls-cert = \"c\"",
        "tls-key = \"k\"",
        "tls-client-ca = \"a\"",
        &format!("{pair}\ntls-require-client-cert = true"),
        &format!("{pair}\ntls-handshake-timeout = \"1ms\""),
    ] {
        assert!(resolve(wrong).is_err(), "{wrong}");
    }
}

/// What `--help` says of defaults, against what they are.
#[test]
fn the_help_knows_the_defaults() {
    let shown: toml::Table = toml::from_str(&Config::default().shown()).unwrap();
    let all = <Options as clap::Args>::augment_args(clap::Command::new("serve"));
    let mut checked = 0;
    for arg in all.get_arguments() {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let option = arg.get_long().unwrap_or_default();
        let said = help
            .split_once("[default: ")
            .and_then(|(_, rest)| rest.split(']').next());
        let (Some(said), Some(is)) = (said, shown.get(option)) else {
            continue;
        };
        let time = |text: &str| humantime::parse_duration(text).ok();
        let same = match is {
            toml::Value::Integer(n) => said.parse() == Ok(*n),
            toml::Value::Float(f) => said.parse() == Ok(*f),
            toml::Value::String(text) => text == said || time(text) == time(said),
            other => other.to_string() == said,
        };
        // Some are told in words.
        if said.bytes().next().is_some_and(|b| b.is_ascii_digit()) && !said.contains(' ') {
            assert!(same, "{option}: the help says {said}, it is {is}");
            checked += 1;
        }
    }
    assert!(checked > 40, "{checked}");
}

/// Whatever file it was given by mistake: what is in it stays there.
#[test]
fn a_file_that_is_no_toml_is_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    for text in [
        "berth_S3CRET\n",
        "max-pins = 3\ncredentials = \"S3CRET\n",
        "= S3CRET",
        "listen = S3CRET",
    ] {
        std::fs::write(&path, text).unwrap();
        let fault = file::read(&path).unwrap_err();
        assert!(!fault.contains("S3CRET"), "{fault}");
        assert!(
            fault.contains("--config") && fault.contains("line "),
            "{fault}"
        );
    }
}

#[test]
fn client_certificates_need_tls() {
    let options: Options = toml::from_str("tls-require-client-cert = true").unwrap();
    let error = Config::resolve(options).unwrap_err().to_string();
    assert!(
        error.contains("tls-require-client-cert: needs tls-cert"),
        "{error}"
    );
}
