"""One public class a method, a file each: its options, what they mean and their checks."""
